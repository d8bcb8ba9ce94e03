"""Numbers that belong to RWKV-7 and its vocabulary, each with its source. No limits a user may change: those are in `config`."""

HEAD_SIZE = 64  # key and value channels of one head; fixed in every released x070 checkpoint
WORLD_VOCAB_SIZE = 65536  # rows of the embedding and head of the World models; ids 65530 and above have no text
END_OF_TEXT_ID = 0  # separates documents and ends an answer; has no entry in the vocabulary file

LAYER_NORM_EPS = 1e-5  # torch's default, used by ln0, ln1, ln2 and ln_out
GROUP_NORM_EPS = 64e-5  # ln_x: 1e-5 times the head size, as in the x070 reference
KK_NORM_EPS = 1e-12  # floor of the norm when kk is normalised (torch.nn.functional.normalize)
DECAY_SCALE = 0.6065306597126334  # exp(-0.5): log decay = -DECAY_SCALE * sigmoid(w), so decay lies in (0.5452, 1)

# Squared ReLU in float16, whose range plain squares leave at an argument of 255.9: the argument is multiplied by CMIX_SCALE
# before it is squared, and the output of the value matrix divided by its square in float32. Arguments up to CMIX_BOUND pass
# (2047 / 8 squared is 65472), larger ones are clamped to it; squares below 4e-6 vanish.
CMIX_BOUND = 2047.0
CMIX_SCALE = 0.125

MAX_LOGPROBS = 20  # top alternatives a request may ask for, as in the OpenAI API
MAX_EDITED_IDS = 1024  # ids one request may name in logit_bias, banned_token_ids and stop_token_ids; a slot's table holds them
LEAST_COUNT = 1e-30  # counts decay no further, so that one above zero says that its id was drawn; far below any penalty's effect
