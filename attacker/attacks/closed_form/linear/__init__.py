"""The closed form `linear`, for networks that begin with a linear layer: its inputs, of one example or a batch, and labels.

For a layer z = W x + b and a batch X (B, F), the gradient is [dL/dW, dL/db] = D^T [X, 1], where D = dL/dz. `route` recovers X
and the labels of a case, and says what is uncertain about them. It uses the first linear layer of a chain (`first_layer`), a
layer that sees the examples in another network (`direct_layer`), or one that sees their patches (`closed_form.patches`).

One example: the ratio of the two gradients (`single_example`). A batch, if a ReLU follows, by the zeros of D:

- `isolation`: rows of the gradient that belong to a single example.
- `whole_batch`: all examples. With the factorisation D^T [X, 1] = L V (`low_rank`), D^T = L Q and [X, 1] = Q^-1 V. The columns
  of Q are the directions along which L is zero at many neurons (`zeros`). They are found by random samples (`sparse`, with
  `sampling` and `directions`), or in large batches by the two values that D takes at a neuron (`constant_modulus`,
  `refinement`). Examples that are known already are subtracted first (`known_examples`).

`batch_labels` finds the labels by gradients at z that are simulated for each label (`label_gradients`), and `doubts` tells right
examples from possible mixtures. `layer_gradient` has the gradient and the answer that all of these share.
"""
