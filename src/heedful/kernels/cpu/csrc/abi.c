// The layouts of the structs that Python fills in, which it checks when it loads the library.

#include <stddef.h>

#include "common.h"
#include "structs.h"

typedef struct {
  const char *name;  // of a struct, or struct.field
  int64_t offset, size;
} AbiField;

#define STRUCT(s) {#s, 0, sizeof(s)}
#define FIELD(s, f) {#s "." #f, offsetof(s, f), sizeof(((s *)0)->f)}
#define M(f) FIELD(PackedMatrix, f)
#define N(f) FIELD(NormWeights, f)
#define L(f) FIELD(DecodeLayer, f)
#define C(f) FIELD(LayerCache, f)
#define D(f) FIELD(DecodeStep, f)
#define B(f) FIELD(BlockArguments, f)
#define A(f) FIELD(AdamWSettings, f)

static const AbiField FIELDS[] = {
    STRUCT(PackedMatrix), M(kind), M(n_inputs), M(n_outputs), M(weight), M(scales), M(bias),
    STRUCT(NormWeights), N(kind), N(size), N(weight), N(bias), N(eps),
    STRUCT(DecodeLayer), L(residual), L(activation), L(gated), L(window), L(n_heads), L(n_kv_heads), L(d_head),
    L(scale), L(cross_scale), L(attention_norm), L(attention_post_norm), L(cross_norm), L(feedforward_norm),
    L(feedforward_post_norm), L(query_norm), L(key_norm), L(qkv), L(output), L(cross_query), L(cross_output), L(up),
    L(down),
    STRUCT(LayerCache), C(kind), C(keys), C(values), C(block_stride), C(head_stride), C(position_stride),
    C(cross_keys), C(cross_values), C(cross_row_stride), C(cross_head_stride), C(cross_position_stride),
    STRUCT(DecodeStep), D(n_tokens), D(width), D(rows), D(positions), D(block_tables), D(max_blocks), D(block_size),
    D(clear_blocks), D(cos), D(sin), D(n_rotated_pairs), D(rotation_stride), D(interleaved), D(bias),
    D(bias_token_stride), D(bias_head_stride), D(n_memory), D(norm),
    STRUCT(BlockArguments), B(n_sequences), B(length), B(width), B(hidden), B(n_heads), B(n_kv_heads), B(d_head),
    B(rms), B(activation), B(gated), B(causal), B(bfloat16), B(threads), B(scale), B(eps), B(weights), B(gradients),
    B(mask), B(mask_stride), B(cos), B(sin), B(n_rotated_pairs), B(rotation_stride), B(interleaved), B(x), B(d_y), B(y), B(d_x),
    B(dropout), B(seed), B(saved), B(workspace),
    STRUCT(AdamWSettings), A(lr), A(beta1), A(beta2), A(eps), A(weight_decay),
};

EXPORT int64_t abi_version(void) { return ABI_VERSION; }

EXPORT const AbiField *abi_fields(int64_t *n) {
  *n = sizeof(FIELDS) / sizeof(FIELDS[0]);
  return FIELDS;
}
