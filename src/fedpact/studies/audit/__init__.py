"""What an attacker finds out by experiment: lower bounds on ε, to set beside the claimed ones.

An audit cannot prove privacy. It can show that a claim is wrong: at 95 % confidence, where the
lower bound that an attack reaches is above the ε that the accountant states.
"""
