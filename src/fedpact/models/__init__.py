"""The papers' models; any nn.Module works."""
