"""`rlinf-actors serve`: metrics for Prometheus, and a page that shows the cluster. It only asks."""
