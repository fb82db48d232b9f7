"""Where tools act: adapters of the environment port."""
