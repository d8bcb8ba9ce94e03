"""Numbers that belong to RWKV-7 and its vocabulary, each with its source. No limits a user may change: those are in `config`."""

HEAD_SIZE = 64  # key and value channels of one head; fixed in every released x070 checkpoint
WORLD_VOCAB_SIZE = 65536  # rows of the embedding and head of the World models; ids 65530 and above have no text
END_OF_TEXT_ID = 0  # separates documents and ends an answer; has no entry in the vocabulary file

LAYER_NORM_EPS = 1e-5  # torch's default, used by ln0, ln1, ln2 and ln_out
GROUP_NORM_EPS = 64e-5  # ln_x: 1e-5 times the head size, as in the x070 reference
KK_NORM_EPS = 1e-12  # floor of the norm when kk is normalised (torch.nn.functional.normalize)
DECAY_SCALE = 0.6065306597126334  # exp(-0.5): log decay = -DECAY_SCALE * sigmoid(w), so decay lies in (0.5452, 1)

MAX_LOGPROBS = 20  # top alternatives a request may ask for, as in the OpenAI API
