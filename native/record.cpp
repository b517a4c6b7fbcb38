#include "record.h"

namespace shmstage {

bool same_kind(const Record& a, const Record& b) {
    return a.present == b.present && a.experts == b.experts && a.shape.layers == b.shape.layers &&
           a.shape.top_k == b.shape.top_k;
}

Totals totals_of(const std::vector<const Record*>& records) {
    Totals totals{0, 0, 0};
    for (const Record* record : records) {
        totals.tokens += record->tokens;
        totals.loss_tokens += record->loss_tokens;
        totals.trained += record->loss_tokens != 0;
    }
    return totals;
}

std::vector<Source> words_of(const std::vector<const Record*>& records, std::size_t number) {
    std::vector<Source> sources;
    sources.reserve(records.size());
    for (const Record* record : records) sources.push_back({record->words[number], record->tokens});
    return sources;
}

std::vector<RoutingSource> routing_of(const std::vector<const Record*>& records) {
    std::vector<RoutingSource> sources;
    sources.reserve(records.size());
    for (const Record* record : records) sources.push_back(record->routing);
    return sources;
}

}  // namespace shmstage
