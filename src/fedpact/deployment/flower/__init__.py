"""The deployment's transport over Flower; nothing else imports Flower but the Ray engine."""
