"""The admin port: metrics, health, admin API."""
