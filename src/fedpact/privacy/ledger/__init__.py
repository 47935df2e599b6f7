"""What a site has promised and spent: an auditor reads this folder, and no other."""
