"""The live plane: hints and previews, never truth. Adapters of the bus port live here."""
