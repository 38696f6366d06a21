"""An HTTP server with OpenAI's interface, for an `Engine`. It needs the extra `serve`, and nothing else imports it.

A request goes this way: `app` routes it, `fields` reads its body, `prompts` makes token ids, `parameters` makes
`SamplingParams`, the engine answers, and `answers` writes what its handles say as one response or as a stream.
"""
