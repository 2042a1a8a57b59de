// Cuts a forest in pieces.
#pragma once
#include <string.h>

#include <vector>

#include "hsa/native/plan.h"
#include "native/common.h"

// A SignalTree. Mirrored by library.py.
struct Forest {
    int64_t nodes, rows, trees;
    const int64_t *first_child, *child_count, *leaf_count, *leaf_begin, *leaf_row, *leaf_order,
        *row_node;
    int32_t* plan;
    int64_t room, leaves;
};

namespace {

typedef std::vector<int32_t> Ints;

class Planner {
   public:
    explicit Planner(const Forest& forest) : f_(forest) { memset(&header_, 0, sizeof header_); }

    // The size of the plan, which is written if there is room for it.
    int64_t run() {
        for (int64_t root = 0; root < f_.trees;) {
            if (is_large(root)) {
                most_ = PART;
                add_tree((int32_t)root++);
                most_ = CHUNK;
                continue;
            }
            Unit unit = new_unit();
            root = add_chunk(&unit, root, f_.trees, -1, 0);
            units_.push_back(unit);
        }
        for (int64_t row = 0; row < f_.rows; row++)
            if (f_.row_node[row] < 0) outside_.push_back((int32_t)row);
        return write();
    }

   private:
    bool is_large(int64_t node) const { return f_.leaf_count[node] > most_; }

    Unit new_unit() const {
        Unit unit;
        memset(&unit, 0, sizeof unit);
        unit.piece = (int32_t)pieces_.size();
        unit.top = -1;
        return unit;
    }

    Piece new_piece() const {
        Piece piece;
        memset(&piece, 0, sizeof piece);
        piece.place = (int32_t)node_.size();
        piece.level = (int32_t)levels_.size();
        piece.leaf = (int32_t)leaf_order_.size();
        return piece;
    }

    void add_place(int64_t node, int32_t parent, int64_t begin, int64_t row) {
        node_.push_back((int32_t)node);
        parent_.push_back(parent);
        first_.push_back(0);
        count_.push_back(0);
        leaves_.push_back((int32_t)f_.leaf_count[node]);
        begin_.push_back((int32_t)begin);
        row_.push_back((int32_t)row);
    }

    // A level of the piece from the inner nodes of the level before; false if there are none.
    template <class IsInner, class RowOf>
    bool add_level(const Piece& piece, int64_t low, int64_t high, int64_t begin, IsInner is_inner,
                   RowOf row_of) {
        for (int64_t at = low; at < high; at++) {
            const int64_t node = node_[(size_t)at];
            if (!is_inner(node)) continue;
            first_[(size_t)at] = (int32_t)((int64_t)node_.size() - piece.place);
            count_[(size_t)at] = (int32_t)f_.child_count[node];
            for (int64_t i = 0; i < f_.child_count[node]; i++) {
                const int64_t child = f_.first_child[node] + i;
                add_place(child, (int32_t)(at - piece.place), f_.leaf_begin[child] - begin,
                          row_of(child));
            }
        }
        return (int64_t)node_.size() > high;
    }

    template <class IsInner, class RowOf>
    void add_levels(Piece* piece, int64_t begin, IsInner is_inner, RowOf row_of) {
        int64_t low = piece->place, high = (int64_t)node_.size();
        piece->roots = (int32_t)(high - low);
        add_level_start(0);
        add_level_start(high - low);
        piece->levels = 1;
        while (add_level(*piece, low, high, begin, is_inner, row_of)) {
            low = high;
            high = (int64_t)node_.size();
            add_level_start(high - piece->place);
            piece->levels++;
        }
        piece->nodes = (int32_t)(high - piece->place);
        for (int32_t l = 0; l < piece->levels; l++) {
            Level& level = levels_[(size_t)(piece->level + l)];
            level.above = piece->kept;
            level.uniform = in_order(*piece, l) ? LEAVES_IN_ORDER : common_size(*piece, l);
            for (int n = 0; n < WIDTHS; n++)
                piece->kept.vectors[n] += count_kept(*piece, l, 4 << n);
        }
    }

    void add_level_start(int64_t first) {
        Level level;
        memset(&level, 0, sizeof level);
        level.first = (int32_t)first;
        levels_.push_back(level);
    }

    int64_t start(const Piece& piece, int32_t level) const {
        return piece.place + levels_[(size_t)(piece.level + level)].first;
    }

    int32_t common_size(const Piece& piece, int32_t level) const {
        const int64_t low = start(piece, level), high = start(piece, level + 1);
        for (int64_t at = low; at < high; at++)
            if (count_[(size_t)at] != count_[(size_t)low]) return 0;
        return count_[(size_t)low];
    }

    bool in_order(const Piece& piece, int32_t level) const {
        const int64_t low = start(piece, level), high = start(piece, level + 1);
        for (int64_t at = low; at < high; at++)
            if (count_[(size_t)at] || row_[(size_t)low] < 0 ||
                row_[(size_t)at] - row_[(size_t)low] != at - low)
                return false;
        return true;
    }

    // Siblings (or roots) from `node` on, as many as go in a chunk; returns the next one.
    int64_t add_chunk(Unit* unit, int64_t node, int64_t end, int32_t parent, int64_t own) {
        Piece piece = new_piece();
        const int64_t begin = f_.leaf_begin[node];
        piece.parent = parent;
        piece.own = (int32_t)own;
        piece.slot = unit->slots;
        while (node < end && !is_large(node) && piece.leaves + f_.leaf_count[node] <= most_) {
            add_place(node, -1, f_.leaf_begin[node] - begin, f_.leaf_row[node]);
            piece.leaves += (int32_t)f_.leaf_count[node++];
        }
        add_levels(
            &piece, begin, [&](int64_t n) { return f_.child_count[n] > 0; },
            [&](int64_t n) { return f_.leaf_row[n]; });
        unit->slots += piece.roots;
        piece.before = unit->kept;
        for (int n = 0; n < WIDTHS; n++) unit->kept.vectors[n] += piece.kept.vectors[n];
        leaf_order_.resize(leaf_order_.size() + (size_t)piece.leaves);
        for (int64_t at = piece.place; at < piece.place + piece.nodes; at++)
            if (count_[(size_t)at] == 0)
                leaf_order_[(size_t)(piece.leaf + begin_[(size_t)at])] =
                    (int32_t)(at - piece.place);
        header_.chunk_nodes = (int32_t)most(header_.chunk_nodes, piece.nodes);
        pieces_.push_back(piece);
        unit->chunks++;
        return node;
    }

    void add_tree(int32_t root) {
        Unit unit = new_unit();
        Piece top = new_piece();
        top.parent = -1;
        add_place(root, -1, 0, -1);
        add_levels(
            &top, f_.leaf_begin[root], [&](int64_t n) { return is_large(n); },
            [](int64_t) { return -1; });
        // Its chunks, in the order of its places.
        const int64_t end = top.place + top.nodes;
        for (int64_t at = top.place; at < end; at++) {
            const int64_t first = first_[(size_t)at], count = count_[(size_t)at];
            for (int64_t i = 0; i < count;) {
                const int64_t child = node_[(size_t)(top.place + first + i)];
                if (is_large(child)) {
                    i++;
                    continue;
                }
                const int64_t past = node_[(size_t)(top.place + first)] + count;
                const int32_t slot = unit.slots;
                const int64_t next = add_chunk(&unit, child, past, (int32_t)(at - top.place), i);
                for (int64_t n = 0; n < next - child; n++)
                    row_[(size_t)(top.place + first + i + n)] = (int32_t)(slot + n);
                i += next - child;
            }
        }
        header_.top_nodes = (int32_t)most(header_.top_nodes, top.nodes);
        unit.top = (int32_t)pieces_.size();
        pieces_.push_back(top);
        units_.push_back(unit);
    }

    int32_t count_kept(const Piece& piece, int32_t level, int64_t lanes) const {
        int64_t vectors = 0, filled = 0, columns = 0;
        for (int64_t at = start(piece, level); at < start(piece, level + 1); at++) {
            const int64_t size = count_[(size_t)at];
            if (size > most_packed(lanes)) {
                const int64_t groups = (size + lanes - 1) / lanes;
                vectors += groups * (size > STORED ? 1 : size) + columns;
                filled = columns = 0;
                continue;
            }
            if (filled + size > lanes) {
                vectors += columns;
                filled = columns = 0;
            }
            filled += size;
            columns = most(columns, size);
        }
        return (int32_t)(vectors + columns);
    }

    int64_t write() {
        header_.nodes = (int32_t)f_.nodes;
        header_.rows = (int32_t)f_.rows;
        header_.trees = (int32_t)f_.trees;
        header_.pieces = (int32_t)pieces_.size();
        header_.units = (int32_t)units_.size();
        header_.places = (int32_t)node_.size();
        header_.levels = (int32_t)levels_.size();
        header_.leaves = (int32_t)leaf_order_.size();
        header_.outside = (int32_t)outside_.size();
        header_.in_order = 1;
        for (int64_t i = 1; i < f_.leaves; i++)
            if (f_.leaf_row[f_.leaf_order[i]] <= f_.leaf_row[f_.leaf_order[i - 1]])
                header_.in_order = 0;
        const int64_t size = (int64_t)(sizeof(Header) / 4 + pieces_.size() * (sizeof(Piece) / 4) +
                                       units_.size() * (sizeof(Unit) / 4) +
                                       levels_.size() * (sizeof(Level) / 4) +
                                       7 * node_.size() + leaf_order_.size() + outside_.size() + SPARE);
        header_.size = (int32_t)size;
        if (size > f_.room) return size;
        int32_t* to = f_.plan;
        put(&to, &header_, 1);
        put(&to, pieces_.data(), pieces_.size());
        put(&to, units_.data(), units_.size());
        put(&to, levels_.data(), levels_.size());
        for (const Ints* part : {&node_, &parent_, &first_, &count_, &leaves_, &begin_,
                                 &row_, &leaf_order_, &outside_})
            put(&to, part->data(), part->size());
        memset(to, 0, SPARE * sizeof *to);
        return size;
    }

    template <class T>
    static void put(int32_t** to, const T* from, size_t count) {
        if (count) memcpy(*to, from, count * sizeof(T));
        *to += count * sizeof(T) / 4;
    }

    const Forest& f_;
    int64_t most_ = CHUNK;  // leaves of a chunk
    Header header_;
    std::vector<Piece> pieces_;
    std::vector<Unit> units_;
    std::vector<Level> levels_;
    Ints node_, parent_, first_, count_, leaves_, begin_, row_, leaf_order_, outside_;
};

}  // namespace
