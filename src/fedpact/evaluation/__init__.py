"""What a model is worth on records that were held out of training, as a site may release it."""
