"""The three protocols. Each module has the same four functions, pure, of JSON bodies:

request(body) -> ChatRequest                 raises ChatError; further keys and unknown tool types are accepted
reply(reply, body) -> dict                   the body of an unstreamed answer, every field of the protocol in it
events(full, body) -> (event name, data)...  the same answer (`full`, from `reply`) as server-sent events
error(error) -> dict                         a refusal in the protocol's shape and words
"""

from molt.chat.wires import chat, messages, responses

WIRES = {"/chat/completions": chat, "/responses": responses, "/messages": messages}
