"""Groups of workers: launching them, calling them, and what the calls give back."""
