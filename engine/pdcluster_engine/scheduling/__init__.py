"""What the model thread computes next, and what becomes of each token.

orders     what the owner thread asks for: begin a computation, stop one
sequence   one computation: its pages, its history, how far it is
answer     tokens to text, and the end of an answer
scheduler  the order of things: one chunk of one prompt, then one token of every answer
worker     the model thread: orders in, forwards, events and outputs out
"""
