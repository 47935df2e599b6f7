"""What carries a task to the sites and brings back the replies."""
