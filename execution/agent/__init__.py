"""An agent job: a LangGraph graph, run durably on a leased task."""
