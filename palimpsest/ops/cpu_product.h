// Products of weights with many rows of x. What few rows need is to read the weights fast (cpu_step.h); more rows need each weight
// widened once and used from registers. Sums run in the order of `plain_rows` and `q8_0_rows`, so a row of x gives the same
// numbers whichever of them it meets. Part of cpu.cpp, which includes it inside its namespace.

// A tile is TOKENS rows of x against SIDE rows of W: one sum to a lane of the vector that `sums` leaves.
const int TOKENS = 4, SIDE = LANES / TOKENS;
static int64_t MANY = 16;

// y[t][r] = <w[r], x[t]> for COUNT <= TOKENS rows of x, all float32: w [SIDE, columns], rows of y `pitch` apart.
template <int COUNT>
INLINE void tile_of(const float *w, const float *x, float *y, int64_t columns, int64_t pitch) {
    vec part[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES) {
        vec row[SIDE];
#pragma GCC unroll 4
        for (int r = 0; r < SIDE; ++r) row[r] = load(w + r * columns + i);
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            vec here = load(x + t * columns + i);
#pragma GCC unroll 4
            for (int r = 0; r < SIDE; ++r) part[t * SIDE + r] += row[r] * here;
        }
    }
    alignas(BYTES) float sum[LANES];
    store(sum, sums(part));
    for (; i < columns; ++i)
        for (int t = 0; t < COUNT; ++t)
            for (int r = 0; r < SIDE; ++r) sum[t * SIDE + r] += w[r * columns + i] * x[t * columns + i];
    for (int t = 0; t < COUNT; ++t) std::memcpy(y + t * pitch, sum + t * SIDE, SIDE * 4);
}

// LANES rows of weights from number `start` on as float32: where they lie, or widened into `room`.
INLINE const float *widened_rows(int32_t kind, const void *weight, const uint16_t *scale, int64_t start, int64_t columns, float *room) {
    if (kind == 0) return (const float *)weight + start;
    int64_t count = LANES * columns;
    if (kind == 1) {
        for (int64_t i = 0; i < count; i += LANES) store(room + i, wide_bf16((const uint16_t *)weight + start + i));
        return room;
    }
    const int8_t *code = (const int8_t *)weight + start;
    for (int64_t i = 0; i < count; i += 32) {
        vec factor = factor_of_half(scale[(start + i) / 32]);
        for (int64_t part = i; part < i + 32; part += LANES) store(room + part, factor * wide_int8(code + part));
    }
    return room;
}
