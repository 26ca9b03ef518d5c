"""What every process of the product needs to run: clock, named threads, stop signals, configuration, logging."""
