"""The template process, which imports the modules that workers need and then forks a worker for each request."""
