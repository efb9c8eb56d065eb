"""Groups of workers: launching a group, calling its methods, and the results of the calls."""
