"""ticket-router: tickets from Kafka to the right topic, with a stated error rate, or to a person."""
