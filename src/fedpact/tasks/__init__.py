"""What is learnt: classes, numbers, several labels or pixels, and by which loss."""
