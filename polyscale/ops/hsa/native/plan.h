// A forest cut in pieces for the kernel. All of it lies in one array of int32.
//
// A chunk holds some whole subtrees: siblings, at most PART leaves together, or whole trees, at most
// CHUNK leaves. What
// is above the chunks of a tree is its top, a piece of the same kind whose leaves are the roots of
// the chunks. A unit is what can be computed on its own: one chunk of whole trees, or a tree with
// its chunks and its top.
#pragma once
#include <stdint.h>

// A plan is read in whole vectors, up to SPARE numbers past what is meant.
enum { CHUNK = 256, PART = 128, SPARE = 16, SEGMENTS = 16, STORED = 512, WIDTHS = 3 };
enum { LEAVES_IN_ORDER = -1 };

// Vectors of family weights that a piece keeps, for vectors of 4, 8 and 16 lanes.
struct Kept {
    int32_t vectors[WIDTHS];
};

struct Header {
    int32_t size;  // of the plan
    int32_t nodes, rows, trees, pieces, units;
    int32_t places;           // nodes of all pieces
    int32_t levels, leaves;   // of all pieces
    int32_t outside;          // rows without a leaf
    int32_t in_order;         // leaves from left to right carry rising rows
    int32_t chunk_nodes, top_nodes;  // of the largest chunk and the largest top
    int32_t reserved[3];
};

struct Piece {
    int32_t place, nodes;     // its part of the arrays of places
    int32_t level, levels;    // its part of the array of levels
    int32_t roots;
    int32_t leaf, leaves;     // its part of leaf_order; none for a top
    int32_t parent;           // of the roots, in the top; -1 for roots of trees
    int32_t own;              // which child of it the first root is
    int32_t slot;             // the first root's number among the chunk roots of the unit
    Kept before, kept;        // vectors of the unit's chunks before it, and its own
};

struct Unit {
    int32_t piece, chunks;    // its chunks
    int32_t top;              // or -1
    int32_t slots;            // roots of its chunks
    Kept kept;                // of all chunks
};

// The nodes of a depth in a piece.
struct Level {
    int32_t first;
    // How many children each of them has; 0 if they differ or there are leaves; LEAVES_IN_ORDER if all
    // are leaves and each carries the row after the one before.
    int32_t uniform;
    Kept above;       // vectors that the families of the levels above keep
};

// Nodes of a piece are numbered level by level, from 0; siblings are neighbours.
struct Places {
    const int32_t *node, *parent, *first, *count, *leaves, *begin, *row;
};

struct TreePlan {
    const Header* header;
    const Piece* pieces;
    const Unit* units;
    const Level* levels;        // of each piece, and one where the last ends
    Places places;              // `row` of a top's leaf is the slot of a chunk root
    const int32_t* leaf_order;  // leaves of a chunk from left to right
    const int32_t* outside;
};

static inline TreePlan read_plan(const int32_t* data) {
    TreePlan p;
    p.header = (const Header*)data;
    const Header& h = *p.header;
    data += sizeof(Header) / 4;
    p.pieces = (const Piece*)data;
    data += h.pieces * (int64_t)(sizeof(Piece) / 4);
    p.units = (const Unit*)data;
    data += h.units * (int64_t)(sizeof(Unit) / 4);
    p.levels = (const Level*)data;
    data += h.levels * (int64_t)(sizeof(Level) / 4);
    const int32_t** arrays[] = {&p.places.node,   &p.places.parent, &p.places.first, &p.places.count,
                                &p.places.leaves, &p.places.begin,  &p.places.row};
    for (const int32_t** array : arrays) {
        *array = data;
        data += h.places;
    }
    p.leaf_order = data;
    p.outside = data + h.leaves;
    return p;
}

// Families of up to half a vector's lanes are worked on together, as many as fit in a vector.
static inline int64_t most_packed(int64_t lanes) { return lanes / 2; }
