// The log format of undo_sve.c: differences of bit patterns in groups. A group has three streams, one per array, and
// each stream is packed at the narrowest width that fits.
//
//   group := control (1 byte), differences of param, of exp_avg, of exp_avg_sq
//
//   control       streams
//   w             all; w has two bits of width per stream
//   ZEROS + w     param, with width w; the old moments are zeros
//
// An optimizer's first step needs the last form. Its estimates of moments that were zeros are small numbers, whose bit
// patterns are far from that of zero.
//
// Groups have GROUP elements whatever the vector length, so that threads with vectors of different lengths can read
// each other's logs. The groups of a chunk fit in log_capacity() bytes (kernels/src/log.rs).

#ifndef SPILLWAY_KERNELS_LOG_SVE_H
#define SPILLWAY_KERNELS_LOG_SVE_H

#include "sve.h"

enum { GROUP = 16 };

// The streams, in the order in which the inverse corrects them.
enum { PARAM, EXP_AVG, EXP_AVG_SQ, STREAMS };

// Bits of a difference, as encoded in the control byte. The stream of one group takes GROUP / 2 << width bytes.
enum width { W4, W8, W16, W32 };

// Control byte of the form for moments that were zeros, before the width is added.
enum { ZEROS = 64 };

// Old bit pattern minus estimated bit pattern. A NaN estimate counts as zero. Inactive lanes keep the zero of `old`.
INLINE svuint32_t difference(svbool_t active, enum element type, svuint32_t old, svfloat32_t estimate)
{
    return svsub_u32_m(svcmpeq_f32(active, estimate, estimate), old, encode(active, type, estimate));
}

// The old bit pattern: the estimate plus the difference. Without a log, the estimate alone. In lanes that are not in
// `counted`, the estimate counts as zero.
INLINE svuint32_t correct(svbool_t active, svbool_t counted, enum element type, int logged, svuint32_t difference,
                          svfloat32_t estimate)
{
    svuint32_t bits = encode(active, type, estimate);
    return logged ? svadd_u32_m(svcmpeq_f32(counted, estimate, estimate), difference, bits) : bits;
}

// The bits of x without its sign: x ^ (x >> 31).
INLINE svuint32_t magnitude(svuint32_t x)
{
    svbool_t all = svptrue_b32();
    return sveor_u32_x(all, x, svreinterpret_u32_s32(svasr_n_s32_x(all, svreinterpret_s32_u32(x), 31)));
}

INLINE svuint32_t both(svuint32_t a, svuint32_t b)
{
    return svorr_u32_x(svptrue_b32(), a, b);
}

INLINE enum width width_of(svuint32_t magnitudes)
{
    uint32_t bits = svorv_u32(svptrue_b32(), magnitudes);
    return bits <= 0x7 ? W4 : bits <= 0x7f ? W8 : bits <= 0x7fff ? W16 : W32;
}

// Packs one vector of a stream. Not for W4, which packs two vectors at once (pack_halves).
INLINE void pack(svbool_t some, enum width width, svuint32_t bits, unsigned char *to, int64_t vector)
{
    if (width == W8)
        svst1b_vnum_u32(some, to, vector, bits);
    else if (width == W16)
        svst1h_vnum_u32(some, (uint16_t *)to, vector, bits);
    else
        svst1_vnum_u32(some, (uint32_t *)to, vector, bits);
}

INLINE svuint32_t unpack(svbool_t some, enum width width, const unsigned char *from, int64_t vector)
{
    if (width == W8)
        return svreinterpret_u32_s32(svld1sb_vnum_s32(some, (const int8_t *)from, vector));
    if (width == W16)
        return svreinterpret_u32_s32(svld1sh_vnum_s32(some, (const int16_t *)from, vector));
    return svld1_vnum_u32(some, (const uint32_t *)from, vector);
}

// Packs W4: element j is in the low half of byte j, element j + GROUP / 2 in the high half.
INLINE void pack_halves(svbool_t some, svuint32_t low, svuint32_t high, unsigned char *to, int64_t vector)
{
    low = svand_n_u32_x(some, low, 15);
    svst1b_vnum_u32(some, to, vector, svorr_u32_x(some, low, svlsl_n_u32_x(some, high, 4)));
}

INLINE void unpack_halves(svbool_t some, svuint32_t *low, svuint32_t *high, const unsigned char *from, int64_t vector)
{
    svint32_t pairs = svld1sb_vnum_s32(some, (const int8_t *)from, vector);
    *low = svreinterpret_u32_s32(svasr_n_s32_x(some, svlsl_n_s32_x(some, pairs, 28), 28));
    *high = svreinterpret_u32_s32(svasr_n_s32_x(some, pairs, 4));
}

INLINE size_t bytes_of(enum width width)
{
    return GROUP / 2 << width;
}

// Packs one stream of a group that is in four vectors of 128 bits.
INLINE unsigned char *pack_four(enum width width, svuint32_t a, svuint32_t b, svuint32_t c, svuint32_t d,
                                unsigned char *to)
{
    svbool_t all = svptrue_b32();
    switch (width) {
    case W4:
        pack_halves(all, a, c, to, 0);
        pack_halves(all, b, d, to, 1);
        break;
#define CASE(WIDTH)                                                                                                    \
    case WIDTH:                                                                                                        \
        pack(all, WIDTH, a, to, 0);                                                                                    \
        pack(all, WIDTH, b, to, 1);                                                                                    \
        pack(all, WIDTH, c, to, 2);                                                                                    \
        pack(all, WIDTH, d, to, 3);                                                                                    \
        break;
        CASE(W8)
        CASE(W16)
        CASE(W32)
#undef CASE
    }
    return to + bytes_of(width);
}

INLINE const unsigned char *unpack_four(enum width width, svuint32_t *a, svuint32_t *b, svuint32_t *c, svuint32_t *d,
                                        const unsigned char *from)
{
    svbool_t all = svptrue_b32();
    switch (width) {
    case W4:
        unpack_halves(all, a, c, from, 0);
        unpack_halves(all, b, d, from, 1);
        break;
#define CASE(WIDTH)                                                                                                    \
    case WIDTH:                                                                                                        \
        *a = unpack(all, WIDTH, from, 0);                                                                              \
        *b = unpack(all, WIDTH, from, 1);                                                                              \
        *c = unpack(all, WIDTH, from, 2);                                                                              \
        *d = unpack(all, WIDTH, from, 3);                                                                              \
        break;
        CASE(W8)
        CASE(W16)
        CASE(W32)
#undef CASE
    }
    return from + bytes_of(width);
}

INLINE enum width width_of_four(svuint32_t a, svuint32_t b, svuint32_t c, svuint32_t d)
{
    return width_of(both(both(magnitude(a), magnitude(b)), both(magnitude(c), magnitude(d))));
}

// Packs one stream of a group that is in memory, for vectors of any length.
INLINE unsigned char *pack_group(enum width width, const uint32_t *from, unsigned char *to)
{
    const size_t lanes = width == W4 ? GROUP / 2 : GROUP;
    for (size_t lane = 0; lane < lanes; lane += svcntw()) {
        svbool_t some = svwhilelt_b32_u64(lane, lanes);
        svuint32_t bits = svld1_u32(some, from + lane);
        switch (width) {
        case W4:
            pack_halves(some, bits, svld1_u32(some, from + GROUP / 2 + lane), to + lane, 0);
            break;
        case W8:
            pack(some, W8, bits, to + lane, 0);
            break;
        case W16:
            pack(some, W16, bits, to + 2 * lane, 0);
            break;
        case W32:
            pack(some, W32, bits, to + 4 * lane, 0);
            break;
        }
    }
    return to + bytes_of(width);
}

INLINE const unsigned char *unpack_group(enum width width, uint32_t *to, const unsigned char *from)
{
    const size_t lanes = width == W4 ? GROUP / 2 : GROUP;
    for (size_t lane = 0; lane < lanes; lane += svcntw()) {
        svbool_t some = svwhilelt_b32_u64(lane, lanes);
        svuint32_t bits = svdup_n_u32(0), high = bits;
        switch (width) {
        case W4:
            unpack_halves(some, &bits, &high, from + lane, 0);
            svst1_u32(some, to + GROUP / 2 + lane, high);
            break;
        case W8:
            bits = unpack(some, W8, from + lane, 0);
            break;
        case W16:
            bits = unpack(some, W16, from + 2 * lane, 0);
            break;
        case W32:
            bits = unpack(some, W32, from + 4 * lane, 0);
            break;
        }
        svst1_u32(some, to + lane, bits);
    }
    return from + bytes_of(width);
}

#endif
