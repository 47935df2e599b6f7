"""Measuring a mechanism's sensitivity, testing its noise, and attacking it for a lower bound on ε.

An audit cannot prove privacy. It can refute a claim at 95 % confidence, if the attack's lower bound
is above the ε that the accountant states.
"""
