"""Attacks that give lower bounds on ε, to compare with the claimed ones.

An audit cannot prove privacy. It can refute a claim at 95 % confidence, if an attack's lower bound
is above the ε that the accountant states.
"""
