"""What several policies of this kind are made of; no policies themselves."""
