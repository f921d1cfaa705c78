"""The boundary to the inference engine: one wire protocol, a client for it, and two engines that speak it."""
