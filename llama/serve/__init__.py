"""A server on one's own machine: OpenAI's HTTP interface to the texts of one model, and a page. The extra `serve`."""
