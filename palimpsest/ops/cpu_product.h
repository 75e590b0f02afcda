// Products of weights with many rows of x. Few rows are bound by reading the weights (cpu_step.h); with more of them LANES rows of
// weights at a time are widened, once, and stay in the second-level cache while all of x passes. Part of cpu.cpp, which includes
// it inside its namespace.
//
// Sums run in the same order whatever n and the number of threads are. With float32 and bfloat16 weights that is the order of
// `plain_rows`; `q8_0_rows` multiplies with the factor behind the sum of 32 columns, so there the last digits differ.

// A tile is TOKENS rows of x against SIDE rows of W: one sum to a lane of the vector that `sums` leaves.
const int TOKENS = 4, SIDE = LANES / TOKENS;

// y[t][r] = <w[r], x[t]> for COUNT <= TOKENS rows of x, all float32: w [SIDE, columns], rows of y `pitch` apart.
template <int COUNT>
INLINE void tile_of(const float *w, const float *x, float *y, int64_t columns, int64_t pitch) {
    vec part[LANES] = {};
    for (int64_t i = 0; i + LANES <= columns; i += LANES) {
        vec row[SIDE];
#pragma GCC unroll 4
        for (int r = 0; r < SIDE; ++r) row[r] = load(w + r * columns + i);
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            vec here = load(x + t * columns + i);
#pragma GCC unroll 4
            for (int r = 0; r < SIDE; ++r) part[t * SIDE + r] = fused(row[r], here, part[t * SIDE + r]);
        }
    }
    int64_t rest = columns % LANES, end = columns - rest;
    if (rest) {
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            vec here = load_some(x + t * columns + end, rest);
#pragma GCC unroll 4
            for (int r = 0; r < SIDE; ++r)
                part[t * SIDE + r] = fused(load_some(w + r * columns + end, rest), here, part[t * SIDE + r]);
        }
    }
    alignas(BYTES) float sum[LANES];
    store(sum, sums(part));
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

// y [n, LANES], rows `pitch` apart, = x [n, columns] w^T with w [LANES, columns].
INLINE void strip(const float *w, const float *x, float *y, int64_t n, int64_t columns, int64_t pitch) {
    int64_t t = 0;
    for (; t + TOKENS <= n; t += TOKENS)
        for (int r = 0; r < LANES; r += SIDE) tile_of<TOKENS>(w + r * columns, x + t * columns, y + t * pitch + r, columns, pitch);
    for (; t < n; ++t)
        for (int r = 0; r < LANES; r += SIDE) tile_of<1>(w + r * columns, x + t * columns, y + t * pitch + r, columns, pitch);
}

// y [n, rows] = x [n, columns] W^T for rows >= LANES. Called by all threads, which share the rows; none waits at the end.
__attribute__((noinline)) void many_rows(int32_t kind, const void *weight, const uint16_t *scale, const float *x, float *y, int64_t n,
                                         int64_t rows, int64_t columns) {
    Floats room(kind == 0 ? 0 : LANES * columns);
#pragma omp for schedule(static) nowait
    for (int64_t strips = 0; strips < rows / LANES; ++strips) {
        int64_t row = strips * LANES, rest = rows - row - LANES;
        strip(widened_rows(kind, weight, scale, row * columns, columns, room), x, y + row, n, columns, rows);
        if (rest <= 0 || rest >= LANES) continue;
        row += rest;  // what is left is no whole strip: the last LANES rows, some of them for the second time
        strip(widened_rows(kind, weight, scale, row * columns, columns, room), x, y + row, n, columns, rows);
    }
}
