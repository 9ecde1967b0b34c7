"""A frontend's view: every rank's load from the best source there is, its own dispatches, and the choice of a rank."""
