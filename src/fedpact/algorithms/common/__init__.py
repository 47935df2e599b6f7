"""What several algorithms share: local steps, fairness, the control of τ."""
