"""Agent jobs: LangGraph graphs carried out as tasks of the queue, and the team that is built in."""
