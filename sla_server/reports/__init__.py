"""Reports: what a period of an agreement says, as a document that both parties can check."""
