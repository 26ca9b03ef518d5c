"""What every process needs to run: clock, named threads, stop signals, configuration, logging."""
