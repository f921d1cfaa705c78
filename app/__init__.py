"""HTTP service, command line, process supervision and the boundary to the inference engine."""
