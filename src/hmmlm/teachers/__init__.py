"""Teachers: networks whose contextual embeddings an HMM is initialized from."""
