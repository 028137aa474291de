-- claim what is due

SELECT *
FROM
  (SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at,
                                                                                                            event_id,
                                                                                                            event_type,
                                                                                                            aggregate_type,
                                                                                                            aggregate_id,
                                                                                                            tenant_id,
                                                                                                            payload,
                                                                                                            headers,
                                                                                                            unique_key,
                                                                                                            key,
                                                                                                            stream, +available_at,
                                                                                                                     locked_by,
                                                                                                                     strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                       'now')
   FROM "outbox_event"
   WHERE queue = %s
     AND available_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
     AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY queue, available_at, id
   LIMIT %s)
UNION ALL
SELECT *
FROM
  (SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at,
                                                                                                            event_id,
                                                                                                            event_type,
                                                                                                            aggregate_type,
                                                                                                            aggregate_id,
                                                                                                            tenant_id,
                                                                                                            payload,
                                                                                                            headers,
                                                                                                            unique_key,
                                                                                                            key,
                                                                                                            stream, +available_at,
                                                                                                                     locked_by,
                                                                                                                     strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                       'now')
   FROM "outbox_event"
   WHERE queue = %s
     AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY queue, available_at, id
   LIMIT %s);

UPDATE "outbox_event" AS e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s,
                          available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                           'now', %s || ' seconds')
WHERE (id IN (%s, %s)
       AND attempts = %s)
  AND +available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT id
FROM "outbox_event"
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at = %s;

-- claim what is due at a time

SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at,
                                                                                                         event_id,
                                                                                                         event_type,
                                                                                                         aggregate_type,
                                                                                                         aggregate_id,
                                                                                                         tenant_id,
                                                                                                         payload,
                                                                                                         headers,
                                                                                                         unique_key,
                                                                                                         key,
                                                                                                         stream, +available_at,
                                                                                                                  locked_by,
                                                                                                                  strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                    'now')
FROM "outbox_event"
WHERE queue = %s
  AND available_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY queue, available_at, id
LIMIT %s;

UPDATE "outbox_event" AS e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s,
                          available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                           'now', %s || ' seconds')
WHERE (id IN (%s, %s)
       AND attempts = %s)
  AND +available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT id
FROM "outbox_event"
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at = %s;

SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at,
                                                                                                         event_id,
                                                                                                         event_type,
                                                                                                         aggregate_type,
                                                                                                         aggregate_id,
                                                                                                         tenant_id,
                                                                                                         payload,
                                                                                                         headers,
                                                                                                         unique_key,
                                                                                                         key,
                                                                                                         stream, +available_at,
                                                                                                                  locked_by,
                                                                                                                  strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                    'now')
FROM "outbox_event"
WHERE queue = %s
  AND available_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY queue, available_at, id
LIMIT %s;

-- claim by id

SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at, +available_at,
                                                                                                                        locked_by,
                                                                                                                        strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                          'now')
FROM "outbox_event"
WHERE available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
  AND id IN (%s, %s)
  AND created_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
  AND NOT (id IN (%s))
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY available_at, id
LIMIT %s;

UPDATE "outbox_event" AS e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s,
                          available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                           'now', %s || ' seconds')
WHERE (id IN (%s)
       AND attempts = %s)
  AND +available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT id
FROM "outbox_event"
WHERE id IN (%s)
  AND locked_by = %s
  AND locked_at = %s;

SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at, +available_at,
                                                                                                                        locked_by,
                                                                                                                        strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                          'now')
FROM "outbox_event"
WHERE available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
  AND id IN (%s, %s)
  AND created_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
  AND NOT (id IN (%s))
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY available_at, id
LIMIT %s;

-- claim streams

SELECT *
FROM
  (SELECT stream, queue, rescues, +due_at, locked_by, strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                        'now')
   FROM "outbox_stream"
   WHERE queue = %s
     AND due_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
     AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY queue, due_at
   LIMIT %s)
UNION ALL
SELECT *
FROM
  (SELECT stream, queue, rescues, +due_at, locked_by, strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                        'now')
   FROM "outbox_stream"
   WHERE queue = %s
     AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY queue, due_at
   LIMIT %s);

UPDATE "outbox_stream" AS e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s,
                          due_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                     'now', %s || ' seconds')
WHERE stream IN (%s, %s)
  AND +due_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT stream
FROM "outbox_stream"
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at = %s;

-- claim streams, some excluded

SELECT *
FROM
  (SELECT stream, queue, rescues, +due_at, locked_by, strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                        'now')
   FROM "outbox_stream"
   WHERE queue = %s
     AND due_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
     AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
     AND NOT (stream IN (%s))
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY queue, due_at
   LIMIT %s)
UNION ALL
SELECT *
FROM
  (SELECT stream, queue, rescues, +due_at, locked_by, strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                        'now')
   FROM "outbox_stream"
   WHERE queue = %s
     AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
     AND NOT (stream IN (%s))
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY queue, due_at
   LIMIT %s);

-- read streams

SELECT stream, seq, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
FROM "outbox_stream"
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

SELECT e.id, e.attempts, e.rescues, e.listener, e.routes, e.queue, e.history, +e.occurred_at, +e.created_at, +e.deliver_at, +e.first_due_at,
                                                                                                                             e.event_id,
                                                                                                                             e.event_type,
                                                                                                                             e.aggregate_type,
                                                                                                                             e.aggregate_id,
                                                                                                                             e.tenant_id,
                                                                                                                             e.payload,
                                                                                                                             e.headers,
                                                                                                                             e.unique_key,
                                                                                                                             e.key,
                                                                                                                             e.stream,
                                                                                                                             e.seq,
                                                                                                                             e.status,
  (SELECT MIN(u.seq)
   FROM "outbox_event" u
   WHERE u.stream = '?:' || s.key
     AND u.status IN (0, 2)
     AND u.status IN (0, 2, 3)
     AND (u.available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
          OR u.locked_by IS NOT NULL))
FROM "outbox_stream" s
CROSS JOIN "outbox_event" e ON e.rowid IN
  (SELECT rowid
   FROM "outbox_event"
   WHERE stream = s.stream
     AND status IN (0, 2)
     AND status IN (0, 2, 3)
   ORDER BY seq
   LIMIT %s)
WHERE s.stream IN (%s);

-- read streams, dead and due alone

SELECT stream, seq, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
FROM "outbox_stream"
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

SELECT e.id, e.attempts, e.rescues, e.listener, e.routes, e.queue, e.history, +e.occurred_at, +e.created_at, +e.deliver_at, +e.first_due_at,
                                                                                                                             e.event_id,
                                                                                                                             e.event_type,
                                                                                                                             e.aggregate_type,
                                                                                                                             e.aggregate_id,
                                                                                                                             e.tenant_id,
                                                                                                                             e.payload,
                                                                                                                             e.headers,
                                                                                                                             e.unique_key,
                                                                                                                             e.key,
                                                                                                                             e.stream,
                                                                                                                             e.seq,
                                                                                                                             e.status,
  (SELECT MIN(u.seq)
   FROM "outbox_event" u
   WHERE u.stream = '?:' || s.key
     AND u.status IN (0, 2)
     AND u.status IN (0, 2, 3)
     AND (u.available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
          OR u.locked_by IS NOT NULL))
FROM "outbox_stream" s
CROSS JOIN "outbox_event" e ON e.rowid IN
  (SELECT rowid
   FROM "outbox_event"
   WHERE stream = s.stream
     AND status IN (0, 2, 3)
     AND (status <> 2
          OR deliver_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'))
   ORDER BY seq
   LIMIT %s)
WHERE s.stream IN (%s);

-- next retries

SELECT stream, MIN(deliver_at)
FROM "outbox_event"
WHERE stream IN (%s, %s)
  AND status = 2
  AND status IN (0, 2, 3)
  AND NOT EXISTS
    (SELECT 1
     FROM "outbox_event" dead
     WHERE dead.stream = "outbox_event".stream
       AND dead.seq < "outbox_event".seq
       AND dead.status = 3
       AND dead.status IN (0, 2, 3))
GROUP BY stream;

-- renew

UPDATE "outbox_event" AS e
SET available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

SELECT strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now');

UPDATE "outbox_event" AS e
SET available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

SELECT id, available_at >= %s
FROM "outbox_event"
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- renew streams

UPDATE "outbox_stream" AS e
SET due_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

SELECT strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now');

UPDATE "outbox_stream" AS e
SET due_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

SELECT stream, due_at >= %s
FROM "outbox_stream"
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- release

UPDATE "outbox_event" AS e
SET available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds'), locked_by = NULL, locked_at = NULL
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- release when the lease ends

UPDATE "outbox_event" AS e
SET locked_by = NULL, locked_at = NULL
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- release each as it was

UPDATE "outbox_event" AS e
SET available_at = v.due_at, queue = v.queue, locked_by = NULL, locked_at = NULL
FROM
  (SELECT column1 AS id, column2 AS locked_at, column3 AS due_at, column4 AS queue
   FROM (
         VALUES (%s, %s, %s, %s), (%s, %s, %s, %s))) AS v
WHERE e.id = v.id
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at = v.locked_at;

SELECT id
FROM "outbox_event"
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- release streams

UPDATE "outbox_stream" AS e
SET due_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', NULLIF(v.delay,
                                                             -1) || ' seconds'), queue = COALESCE(NULLIF(v.queue,

                                                                                                    ''),
                                                                                           e.queue), rescues = e.rescues * v.kept, locked_by = NULL,
    locked_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
FROM
  (SELECT column1 AS stream, column2 AS seq, column3 AS locked_at, column4 AS delay, column5 AS queue, column6 AS kept
   FROM (
         VALUES (%s, %s, %s, %s, %s, %s), (%s, %s, %s, %s, %s, %s))) AS v
WHERE e.stream = v.stream
  AND e.seq = COALESCE(NULLIF(v.seq, -1), e.seq)
  AND e.locked_by = %s
  AND e.locked_at = v.locked_at;

SELECT stream, locked_by
FROM "outbox_stream"
WHERE stream IN (%s, %s);

-- hand streams back

UPDATE "outbox_stream" AS e
SET due_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds'), locked_by = NULL, locked_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                              'now')
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- settle as done

UPDATE "outbox_event" AS e
SET status = 1, done_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), available_at = NULL, locked_by = NULL,
    locked_at = NULL
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s;

-- settle as done, with a key

UPDATE "outbox_event" AS e
SET status = 1, done_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), available_at = NULL, locked_by = NULL,
    locked_at = NULL
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM "outbox_stream" owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s);

-- delete what is done

DELETE
FROM "outbox_event" AS e
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND unique_key IS NULL;

-- settle

UPDATE "outbox_event" AS e
SET status = v.status, attempts = e.attempts + v.spent, rescues = 0,
    available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', v.delay || ' seconds'), done_at = CASE
                                                                                                       WHEN v.delay IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                                   'now')
                                                                                                   END,
                                                                                                   last_error = COALESCE(v.error,

                                                                                                                  e.last_error),
                                                                                                   cause = COALESCE(v.cause,

                                                                                                             e.cause),
                                                                                                   history = COALESCE(v.history,

                                                                                                               e.history),
                                                                                                   queue = COALESCE(v.queue,

                                                                                                             e.queue),
                                                                                                   locked_by = NULL,
                                                                                                   locked_at = NULL
FROM
  (SELECT column1 AS id, column2 AS locked_at, column3 AS attempts, column4 AS status, column5 AS spent,
          column6 AS delay, column7 AS error, column8 AS cause, column9 AS history, column10 AS queue
   FROM (
         VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s), (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s))) AS v
WHERE e.id = v.id
  AND e.attempts = v.attempts
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at = v.locked_at;

-- settle, with a key

UPDATE "outbox_event" AS e
SET status = v.status, attempts = e.attempts + v.spent, rescues = 0,
    deliver_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', v.delay || ' seconds'), done_at = CASE
                                                                                                     WHEN v.delay IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                                 'now')
                                                                                                 END,
                                                                                                 last_error = COALESCE(v.error,

                                                                                                                e.last_error),
                                                                                                 cause = COALESCE(v.cause,

                                                                                                           e.cause),
                                                                                                 history = COALESCE(v.history,

                                                                                                             e.history),
                                                                                                 queue = COALESCE(v.queue,

                                                                                                           e.queue),
                                                                                                 locked_by = NULL,
                                                                                                 locked_at = NULL
FROM
  (SELECT column1 AS id, column2 AS locked_at, column3 AS attempts, column4 AS status, column5 AS spent,
          column6 AS delay, column7 AS error, column8 AS cause, column9 AS history, column10 AS queue
   FROM (
         VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s), (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s))) AS v
WHERE e.id = v.id
  AND e.attempts = v.attempts
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM "outbox_stream" owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s
       AND owned.locked_at = v.locked_at);

-- route rows

UPDATE "outbox_event" AS e
SET listener = %s, routes = %s, queue = %s, stream = CASE WHEN key IS NOT NULL THEN %s || key
                                                         WHEN stream IS NOT NULL THEN %s || SUBSTR(stream,
                                                                                              15)
                                                     END, available_at = CASE
                                                                             WHEN key IS NULL THEN available_at
                                                                         END, locked_by = CASE
                                                                                              WHEN key IS NULL THEN locked_by
                                                                                          END, locked_at = CASE
                                                                                                               WHEN key IS NULL THEN locked_at
                                                                                                           END
WHERE listener IS NULL
  AND id IN (%s, %s)
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM "outbox_stream" owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s
       AND owned.locked_at IN (%s));

-- add rows

INSERT INTO "outbox_event" (id, listener, routes, queue, stream, first_due_at, available_at, deliver_at,
                            status, attempts, rescues, event_id, event_type, aggregate_type, aggregate_id,
                            tenant_id, payload, headers, occurred_at, created_at, key, seq)
SELECT event_id || %s, %s, %s, %s,
       CASE WHEN key IS NOT NULL THEN %s || key WHEN stream IS NOT NULL THEN %s || SUBSTR(stream,
                                                                                     15)
       END, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'),
       CASE WHEN key IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
       END, CASE WHEN key IS NULL THEN deliver_at
            END, 0, 0, 0, event_id, event_type, aggregate_type,
       aggregate_id, tenant_id, payload, headers, occurred_at, created_at, key, seq
FROM "outbox_event"
WHERE id IN (%s, %s)
  AND routes = %s ON CONFLICT (id) DO NOTHING;

-- lock an event

SELECT id
FROM "outbox_event" AS e
WHERE id >= %s
  AND id < %s
  AND event_id = %s;

-- lock rows

SELECT id, event_id, routes
FROM "outbox_event" AS e
WHERE id IN (%s, %s)
ORDER BY id;

-- note a receipt

UPDATE "outbox_event" AS e
SET routes = %s
WHERE id IN (%s);

-- note a lost worker

UPDATE "outbox_event" AS e
SET rescues = %s, history = CASE WHEN history IS NULL THEN %s ELSE SUBSTR(history,
                                                                     1, LENGTH(history) - 1) || %s
                            END
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at IN (%s);

-- keep a stream suspected

UPDATE "outbox_stream" AS e
SET rescues = %s
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- read what is pending in slots

SELECT *
FROM
  (SELECT stream, seq, id, locked_by
   FROM "outbox_event"
   WHERE stream = %s
     AND status IN (0, 2)
     AND status IN (0, 2, 3)
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000)
UNION ALL
SELECT *
FROM
  (SELECT stream, seq, id, locked_by
   FROM "outbox_event"
   WHERE stream = %s
     AND status IN (0, 2)
     AND status IN (0, 2, 3)
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000);

-- lease the newest of slots

UPDATE "outbox_event" AS e
SET rescues = CASE WHEN rescues < %s THEN %s ELSE rescues
              END, locked_by = %s, locked_at = %s,
              available_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
WHERE id IN (%s, %s)
  AND status IN (0, 2)
  AND (locked_by IS NULL
       AND queue NOT LIKE 'paused:%%'
       AND rescues < 2);

SELECT id, attempts, rescues, listener, routes, queue, history, +occurred_at, +created_at, +deliver_at, +first_due_at,
                                                                                                         event_id,
                                                                                                         event_type,
                                                                                                         aggregate_type,
                                                                                                         aggregate_id,
                                                                                                         tenant_id,
                                                                                                         payload,
                                                                                                         headers,
                                                                                                         unique_key,
                                                                                                         key,
                                                                                                         stream
FROM "outbox_event" AS e
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at IN (%s);

-- end what is coalesced

UPDATE "outbox_event" AS e
SET status = 1, done_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), available_at = NULL, result = %s,
                                                                                                       locked_by = NULL,
                                                                                                       locked_at = NULL
WHERE id IN (%s, %s)
  AND status IN (0, 2)
  AND ((locked_by IS NULL
        AND queue NOT LIKE 'paused:%%'
        AND rescues < 2)
       OR (locked_by = %s
           AND locked_at = %s));

-- find suspects

SELECT *
FROM
  (SELECT 'outbox_event', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_event"
      WHERE queue = %s
        AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
      ORDER BY queue, available_at, id
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
SELECT *
FROM
  (SELECT 'outbox_event', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_event"
      WHERE queue = %s
        AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
      ORDER BY queue, available_at, id
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
SELECT *
FROM
  (SELECT 'outbox_stream', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_stream"
      WHERE queue = %s
        AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
      ORDER BY queue, due_at
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
SELECT *
FROM
  (SELECT 'outbox_stream', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_stream"
      WHERE queue = %s
        AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
      ORDER BY queue, due_at
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)));

-- when is the next due

SELECT *
FROM
  (SELECT queue, available_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   FROM "outbox_event"
   WHERE queue = %s
     AND available_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
   ORDER BY queue, available_at, id
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue, due_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   FROM "outbox_stream"
   WHERE queue = %s
     AND due_at >= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
   ORDER BY queue, due_at
   LIMIT 1);

-- is anything due

SELECT *
FROM
  (SELECT queue, available_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   FROM "outbox_event"
   WHERE queue = %s
     AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   ORDER BY queue, available_at, id
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue, due_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   FROM "outbox_stream"
   WHERE queue = %s
     AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   ORDER BY queue, due_at
   LIMIT 1);

-- other queues

SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

-- move events

SELECT id
FROM "outbox_event"
WHERE queue = %s
  AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
ORDER BY queue, available_at, id
LIMIT %s;

UPDATE "outbox_event" AS e
SET queue = %s
WHERE id IN (%s)
  AND queue = %s
  AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now');

-- move streams

SELECT stream
FROM "outbox_stream"
WHERE queue = %s
  AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
ORDER BY queue, due_at
LIMIT %s;

UPDATE "outbox_stream" AS e
SET queue = %s
WHERE stream IN (%s)
  AND queue = %s
  AND due_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now');

-- wake streams

INSERT INTO "outbox_stream" (stream, key, lane, seq, due_at, queue)
VALUES (%s, %s, %s, (CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000) + %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), %s),
       (%s, %s, %s, (CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000) + %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), %s) ON CONFLICT (stream) DO
UPDATE
SET queue = CASE
                WHEN ("outbox_stream".due_at IS NULL
                      OR "outbox_stream".queue LIKE 'paused:%%') THEN EXCLUDED.queue ELSE "outbox_stream".queue
            END,
            seq = "outbox_stream".seq + 1 + EXCLUDED.seq - (CAST(strftime('%%s',
                                                                   'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f',

                                                                                                                'now'),

                                                                                                         4) AS INTEGER) * 1000), due_at = CASE
                                                                                                                                              WHEN "outbox_stream".locked_by IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                                                                                            'now')
                                                                                                                                              ELSE "outbox_stream".due_at
                                                                                                                                          END;

-- number events

INSERT INTO "outbox_stream" (stream, key, lane, seq, due_at, queue)
VALUES (%s, %s, %s, (CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000) + %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), %s),
       (%s, %s, %s, (CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000) + %s, NULL, %s) ON CONFLICT (stream) DO
UPDATE
SET queue = CASE WHEN "outbox_stream".due_at IS NULL THEN EXCLUDED.queue ELSE "outbox_stream".queue
            END,
            seq = "outbox_stream".seq + 1 + EXCLUDED.seq - (CAST(strftime('%%s',
                                                                   'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f',

                                                                                                                'now'),

                                                                                                         4) AS INTEGER) * 1000), due_at = CASE
                                                                                                                                              WHEN EXCLUDED.due_at IS NULL THEN "outbox_stream".due_at
                                                                                                                                              ELSE COALESCE("outbox_stream".due_at,

                                                                                                                                                     strftime('%%Y-%%m-%%d %%H:%%M:%%f000',

                                                                                                                                                       'now'))
                                                                                                                                          END RETURNING stream,
                                                                                                                                                        seq;

-- what is due first

SELECT *
FROM
  (SELECT id, event_type, listener, key
   FROM "outbox_event"
   WHERE queue = %s
     AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   ORDER BY queue, available_at, id
   LIMIT %s)
UNION ALL
SELECT *
FROM
  (SELECT id, event_type, listener, key
   FROM "outbox_event"
   WHERE queue = %s
     AND available_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
   ORDER BY queue, available_at, id
   LIMIT %s);

-- park rows

SELECT id
FROM "outbox_pause"
WHERE id IN (%s);

UPDATE "outbox_event" AS e
SET queue = %s
WHERE id IN (%s, %s)
  AND locked_by IS NULL
  AND available_at IS NOT NULL;

-- park streams

SELECT id
FROM "outbox_pause"
WHERE id IN (%s);

UPDATE "outbox_stream" AS e
SET due_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', NULLIF(v.delay,
                                                             -1) || ' seconds'), queue = COALESCE(NULLIF(v.queue,

                                                                                                    ''),
                                                                                           e.queue), rescues = e.rescues * v.kept, locked_by = NULL,
    locked_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')
FROM
  (SELECT column1 AS stream, column2 AS seq, column3 AS locked_at, column4 AS delay, column5 AS queue, column6 AS kept
   FROM (
         VALUES (%s, %s, %s, %s, %s, %s), (%s, %s, %s, %s, %s, %s))) AS v
WHERE e.stream = v.stream
  AND e.seq = COALESCE(NULLIF(v.seq, -1), e.seq)
  AND e.locked_by = %s
  AND e.locked_at = v.locked_at;

SELECT stream, locked_by
FROM "outbox_stream"
WHERE stream IN (%s, %s);

-- bring rows home

SELECT id
FROM "outbox_event"
WHERE queue = %s
  AND available_at IS NOT NULL
ORDER BY queue, available_at, id
LIMIT %s;

SELECT id, listener, queue
FROM "outbox_event" AS e
WHERE id IN (%s);

UPDATE "outbox_event" AS e
SET queue = %s, first_due_at = CASE
                                   WHEN e.available_at > strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                           'now') THEN e.first_due_at ELSE strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                                                             'now')
                               END
WHERE id IN (%s)
  AND queue = %s;

-- bring streams home

SELECT stream
FROM "outbox_stream"
WHERE queue = %s
  AND due_at IS NOT NULL
ORDER BY queue, due_at
LIMIT %s;

SELECT stream, seq, id
FROM "outbox_event"
WHERE stream = %s
  AND status IN (0, 2)
  AND status IN (0, 2, 3)
ORDER BY seq
LIMIT 1;

SELECT id, listener, queue
FROM "outbox_event" AS e
WHERE id IN (%s);

UPDATE "outbox_stream" AS e
SET queue = %s
WHERE stream IN (%s)
  AND queue = %s;

-- what is parked without its pause

SELECT id
FROM "outbox_pause";

SELECT *
FROM
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
SELECT *
FROM
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

-- give streams a new version

INSERT INTO "outbox_stream" (stream, key, lane, seq, due_at, queue)
VALUES (%s, %s, %s, (CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000) + %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), %s) ON CONFLICT (stream) DO
UPDATE
SET queue = CASE WHEN "outbox_stream".due_at IS NULL THEN EXCLUDED.queue ELSE "outbox_stream".queue
            END,
            seq = "outbox_stream".seq + 1 + EXCLUDED.seq - (CAST(strftime('%%s',
                                                                   'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%%f',

                                                                                                                'now'),

                                                                                                         4) AS INTEGER) * 1000),
            due_at = COALESCE("outbox_stream".due_at,
                       strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'));

-- take a named lease

UPDATE "outbox_lease"
SET locked_by = %s, locked_until = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                     'now', %s || ' seconds')
WHERE name = %s
  AND (locked_by = %s
       OR locked_by IS NULL
       OR locked_until <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'));

INSERT INTO "outbox_lease" (name)
VALUES (%s) ON CONFLICT DO NOTHING;

-- renew a named lease

UPDATE "outbox_lease"
SET state = %s, locked_by = %s, locked_until = strftime('%%Y-%%m-%%d %%H:%%M:%%f000',
                                                 'now', %s || ' seconds')
WHERE name = %s
  AND locked_by = %s;

-- release a named lease

UPDATE "outbox_lease"
SET state = %s, locked_by = NULL, locked_until = NULL
WHERE name = %s
  AND locked_by = %s;

-- what is paused

SELECT id, kind, name, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), until, pause_seconds
FROM "outbox_pause"
UNION ALL
SELECT id, 'operation', '', strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), NULL, NULL
FROM "outbox_operation"
WHERE state = 'open';

-- open a breaker

INSERT INTO "outbox_pause" (kind, name, reason, paused_at, paused_by, until, pause_seconds)
VALUES ('breaker', %s, %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now'), '', strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds'), %s) ON CONFLICT DO NOTHING;

-- win the probe of a breaker

UPDATE "outbox_pause"
SET until = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')
WHERE kind = 'breaker'
  AND name = %s
  AND until <= strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now');

-- prolong a breaker

UPDATE "outbox_pause"
SET until = strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds'), pause_seconds = %s
WHERE kind = 'breaker'
  AND name = %s;

-- close a breaker

DELETE
FROM "outbox_pause"
WHERE kind = 'breaker'
  AND name = %s;

-- receive a message

INSERT INTO "outbox_inbox" (source, message_id, received_at)
VALUES (%s, %s, strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')) ON CONFLICT DO NOTHING;

-- delete events

DELETE
FROM "outbox_event" AS e
WHERE id IN (%s, %s);

-- delete streams

DELETE
FROM "outbox_stream" AS e
WHERE stream IN (%s, %s);
