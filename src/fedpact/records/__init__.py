"""What runs leave behind, for whoever reads them."""
