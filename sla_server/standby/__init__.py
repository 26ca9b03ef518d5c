"""What a server does while another one acts: it forwards agents, and keeps what delivery routes by."""
