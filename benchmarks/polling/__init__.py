"""What ``benchmarks/poll.py`` runs: payload, swarm of gateways, our pair, the peers, the C floor."""
