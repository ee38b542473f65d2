"""Programs on the device: build, compile, cache, verify, time."""
