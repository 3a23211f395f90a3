// The tracepoint of lttng_cost.c. Included several times over by LTTng's own headers.
#undef LTTNG_UST_TRACEPOINT_PROVIDER
#define LTTNG_UST_TRACEPOINT_PROVIDER hitcost

#undef LTTNG_UST_TRACEPOINT_INCLUDE
#define LTTNG_UST_TRACEPOINT_INCLUDE "./lttng_hit.h"

#if !defined(LTTNG_HIT_H) || defined(LTTNG_UST_TRACEPOINT_HEADER_MULTI_READ)
#define LTTNG_HIT_H

#include <lttng/tracepoint.h>

LTTNG_UST_TRACEPOINT_EVENT(hitcost, hit, LTTNG_UST_TP_ARGS(long, a, long, b),
                           LTTNG_UST_TP_FIELDS(lttng_ust_field_integer(long, a, a) lttng_ust_field_integer(long, b, b)))

#endif

#include <lttng/tracepoint-event.h>
