"""Replay in virtual time: the live gateway's routing code against engine models, on a simulated clock.

Everything between a parsed request and an assignment is the gateway's own: fleet, ledger, breakers, prefix map,
predictor, router, policies. What is simulated: the clock, the engines (`loadtests.engine`), the wires between them, and
the passing of health probes and metrics scrapes.
"""
