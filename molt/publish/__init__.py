"""Weight sync ("publication"): copy the trainer's weights to the engines. gather, transfer, receive, proof."""
