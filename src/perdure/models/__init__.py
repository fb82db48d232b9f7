"""Model providers: adapters of the model port."""
