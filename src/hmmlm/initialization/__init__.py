"""Where learning starts: teachers, their embeddings, clusters of those as labels (LVD), and pretrained networks."""
