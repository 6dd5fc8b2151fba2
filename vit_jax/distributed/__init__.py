"""Device mesh, sharding rules, and jobs with several processes."""
