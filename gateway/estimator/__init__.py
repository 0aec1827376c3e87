"""Roofline estimates: hardware, model shape, step costs, queueing, calibration."""
