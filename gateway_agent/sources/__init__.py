"""Sources of statistics, one file each; ``base`` has the protocol, ``sample`` what a source hands over."""
