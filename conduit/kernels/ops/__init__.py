"""Operations on whole batches that users call: returns, hindsight."""
