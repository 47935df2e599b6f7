"""Many runs side by side, recommendations, audits, and the papers' theory."""
